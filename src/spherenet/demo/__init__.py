"""The local web page of `spherenet demo`: classes of an image, their angles and the patches that respond most."""

from spherenet.demo.analysis import Analyzer
from spherenet.demo.server import DemoServer

__all__ = ["Analyzer", "DemoServer"]
