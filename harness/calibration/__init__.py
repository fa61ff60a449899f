"""What a machine can do, measured once, beside its runs: rates, floors, collectives."""
