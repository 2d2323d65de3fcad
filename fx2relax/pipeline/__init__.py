"""Relax and TIR passes, one file per concern."""
