"""What a machine can do, measured once and kept beside its runs: rates, floors, collectives."""
