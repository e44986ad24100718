"""What attacks the library for hours, and the record that shows that a change moves no number; not in the wheel."""
