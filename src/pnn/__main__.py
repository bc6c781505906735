from pnn.cli import main

main()
