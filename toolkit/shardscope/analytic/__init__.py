"""The closed forms: what formulas say of a job before it runs. NumPy only, no torch."""
