"""Audits of the CUDA graphs that another program captures.

``program_audit.py`` follows each graph from its capture to its end and decides when to check it.
``device.py`` is the only file that talks to torch.cuda and the driver. All others compute on
records, address ranges and tensors of bytes, so that they also run on a stand-in device.
"""
