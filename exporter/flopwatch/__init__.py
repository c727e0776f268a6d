"""flopwatch: is my training run advancing the model, and if not, what is to blame?"""

__version__ = "0.2.0"
