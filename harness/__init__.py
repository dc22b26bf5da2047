"""What both suites stand on: a child process that cannot outlive its parent, hang unseen or leave processes behind."""
