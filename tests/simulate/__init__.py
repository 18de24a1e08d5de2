"""The operator in simulated time: `python -m tests.simulate` runs the real operator on a simulated cluster.

Every interleaving comes from one seed. docs/decisions/0049 says what runs, what is simulated, and what is judged.
"""
