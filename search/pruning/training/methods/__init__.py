"""The methods that training under masks knows, one a file."""
