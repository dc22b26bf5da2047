"""Mutants: small accidental changes to the product, each of which some test or incident must see."""
