"""Models of Hugging Face transformers as lists of units. Only this folder imports it, if a job asks for it."""

from .build import build_units, load_pretrained, save_pretrained, skeleton

__all__ = ["build_units", "load_pretrained", "save_pretrained", "skeleton"]
