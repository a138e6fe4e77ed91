"""Records, and pages of them, as rich renderables for a terminal, a pipe or a file."""
