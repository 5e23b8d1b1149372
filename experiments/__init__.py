"""One readable program per task: the package `ztk.experiments`, in a checkout by the link `ztk/experiments`."""
