"""The only room that runs what nobody trusts: programs that a model wrote, and the tests that judge them.

Fed by `pipelines.evaluation` (answers to be graded) through the port `app.domain.learning.boxes.Boxes`; feeds it what
came out. `wiring` says which keeper: `bubblewrap` (a box of namespaces, a user of its own and limits for each) or
`processes` (limits alone, for what is trusted).
"""
