"""Parameters without local values: placeholders, models built of them, and detection of shared memory."""
