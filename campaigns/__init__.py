"""Attacks on the library that run for hours, and a record that shows whether a change moves a number.

The wheel does not have them.
"""
