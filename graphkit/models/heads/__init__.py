"""Draft heads: EAGLE, EAGLE-3, DFLASH and MTP, and the loading of their folders.

``load`` says which kind of draft model a folder or object is, ``folders`` reads and writes heads in
their published layouts, and ``draft_model`` makes what engines and targets run of them.
"""
