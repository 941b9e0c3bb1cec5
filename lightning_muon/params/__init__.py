"""What each parameter is: routing, logical matrices, shard slices."""
