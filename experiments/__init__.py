"""One readable program per task, and the notebooks that read finished runs."""
