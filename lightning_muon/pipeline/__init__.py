"""Pipeline parallelism at run time: cuts a model into stages, and runs the program of a schedule over them."""
