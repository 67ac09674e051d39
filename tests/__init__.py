"""Tests mirror the package, file for file."""
