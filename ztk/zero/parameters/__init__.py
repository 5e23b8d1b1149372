"""Parameters whose values are elsewhere: placeholders that scripts may read, models built of them, and what shares their memory."""
