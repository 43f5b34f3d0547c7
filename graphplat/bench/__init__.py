"""The benchmark behind ``graphplat bench``: everything side by side, on one device, in one run.

:mod:`graphplat.bench.run` runs sections; each section is a module with a function that fills its part of
a :class:`~graphplat.bench.records.BenchReport`. Ways of running a step are interleaved, get fresh inputs
at every step, and are compared with the eager forward before anything is timed.
"""
