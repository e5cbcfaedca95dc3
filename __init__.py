"""eyas trains EAGLE draft heads for a frozen language model and measures what they win.

This file imports nothing: the command line and the tests read the version without paying for torch.
"""

__version__ = "0.1.0"
