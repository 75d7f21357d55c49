"""Breadth."""
