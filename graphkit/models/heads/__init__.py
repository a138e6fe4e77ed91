"""Draft heads: EAGLE, EAGLE-3, DFLASH and MTP, and the loading of their folders.

``load`` says which kind of draft model a folder or object is and loads it, ``layouts`` reads the
settings that heads are published with, and ``draft_model`` makes what engines run of them.
"""
