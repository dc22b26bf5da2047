"""How alike the choices of neighbouring queries are: measured, recorded, and fitted for the inputs `recorded`."""
