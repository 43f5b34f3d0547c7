"""Runners: what a runtime calls every step."""

from graphplat.runners.base import BaseRunner
from graphplat.runners.decode import DecodeGraphRunner
from graphplat.runners.eager import EagerRunner
from graphplat.runners.graph import GraphRunner
from graphplat.runners.prefill import PrefillGraphRunner

__all__ = ["BaseRunner", "DecodeGraphRunner", "EagerRunner", "GraphRunner", "PrefillGraphRunner"]
