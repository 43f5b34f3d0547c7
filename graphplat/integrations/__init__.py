"""Bridges to model libraries. Each module needs its library installed."""
