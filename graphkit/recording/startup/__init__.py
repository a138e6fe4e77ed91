"""What every Python of a recorded program runs first.

The folder is put on PYTHONPATH: whatever lies here hides modules of the same name.
"""
