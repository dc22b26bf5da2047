"""`compare`: two versions of nsa/ in pairs of processes, and what a group-sequential test says of each case."""
