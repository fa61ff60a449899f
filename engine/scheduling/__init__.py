"""Which tokens the next step computes, and which pages of the K/V cache they take."""
