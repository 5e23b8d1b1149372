"""A report of runs as one HTML file: `page` writes it, `data` collects what it shows, the .js and .css files draw it in the browser."""
