"""A report of runs as one HTML file: `page` writes it, `data` collects its content, and the .js and .css files draw it in the browser."""
