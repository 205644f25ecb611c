"""How a method sees a problem: the process, its checks, and what the checks found."""
