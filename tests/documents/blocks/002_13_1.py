# Profile memory usage
ds_config = {
    "memory_breakdown": True,
    "wall_clock_breakdown": True,
}
