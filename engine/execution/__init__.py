"""One rank's forward: eager, compiled or replayed, warmed up, sized and logged."""
