"""What stands before every port of ours that speaks HTTP: sockets, connections that dawdle, other people's pages, bodies without an end.

Fed by whoever can reach a port / feeds the applications behind it: the API and the console, engines, metrics, the door for editors.
"""
