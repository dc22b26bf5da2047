"""What is timed: each mode prepares one piece of work from a key."""
