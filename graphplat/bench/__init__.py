"""The benchmark behind ``graphplat bench``: everything side by side, on one device, in one run.

:mod:`graphplat.bench.run` runs sections; each section is a module with a function or a class that fills its
part of a :class:`~graphplat.bench.records.BenchReport`. Ways of running a step are interleaved, get fresh
inputs at every step, and are compared before they are timed: steps with the eager forward, generation with
transformers' dynamic cache.
"""
