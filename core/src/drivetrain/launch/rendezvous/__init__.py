"""How the processes of a launch find each other: the room of ``launch/`` that imports torch, when workers start."""
