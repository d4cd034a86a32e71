"""The two pages, of one table and of two side by side, from sections to one HTML text."""
