"""`python -m ztk.deepspeed script.py`: starts the ranks of a script on one or many machines, with ztk as its `deepspeed`.

`options` is the command line, `hosts` which devices of which machines, `plan` what every machine is told, `script` the command of one rank,
`node` the ranks of one machine, `remote` how another machine is reached, `main` the run of it all.
"""
