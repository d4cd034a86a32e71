"""One offline HTML file that shows all of it."""
