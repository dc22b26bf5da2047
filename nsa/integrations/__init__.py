"""NSA inside other training and serving code. A module says whether it needs the package it is named after."""
