"""Pipeline parallelism at run time: a model cut into stages, and the program of a schedule run over them."""
