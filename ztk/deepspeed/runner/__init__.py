"""`python -m ztk.deepspeed script.py`: starts the ranks of a script on one or many machines, with ztk as its `deepspeed`.

Modules: `options` (command line), `hosts` (devices of the machines), `plan` (sent to every machine), `script` (command of one rank),
`node` (ranks of one machine), `remote` (connections), `main` (the complete run).
"""
