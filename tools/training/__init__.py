"""The parts of ``train_reference.py``."""
