"""Dense attention to compare with, each implementation by name; one that is absent says why."""
