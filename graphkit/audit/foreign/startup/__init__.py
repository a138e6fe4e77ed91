"""The folder that recorded programs find first on PYTHONPATH.

Any module in it hides a module of the same name from the program.
"""
