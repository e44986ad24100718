"""An attack on certified rounding errors: nothing that random small programs execute may lie beyond them.

A model of `campaigns.random_models` is converted to a dtype, mixed with layers that round much, certified, and attacked
at inputs of its domain in two ways. It is executed by many kernels, in batches and with sums in many orders, and
compared with the same program in float64. And each operation of that program gets the errors that the stated arithmetic
allows, with the signs that move the result most: these lie close to the bound, and show what float64 cannot show of a
float64 program. `--pairs` searches for two inputs, closer than a certified radius, of which one is executed with
another largest logit, and for settled predictions that differ.

    python -m campaigns.rounding --models 10000 --minutes 60
    python -m campaigns.rounding --only 17      # one model, in full
    python -m campaigns.rounding --pairs 480
"""
