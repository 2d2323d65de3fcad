"""Converters from FX nodes to Relax, one module per operator family."""
