package bookmender;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;

/**
 * Runs the commands that come in on stdin, one a line, one after the other, until stdin ends.
 *
 * <p>A command is a JSON array {@code ["judge", "zk://…", {"ledgers": [1]}]}: name, metadata service
 * URI, options. Answers are JSON lines on stdout; the last of each command is
 * {@code {"kind": "end", "exit": code}}. Everything that others print goes to stderr.
 */
public final class Main {
    static final int WELL = 0;
    static final int FOUND = 1;
    static final int CALLED_WRONGLY = 2;
    static final int COULD_NOT_TELL = 3;

    private interface Command {
        int run(Cluster cluster, Options options, Output output) throws Exception;
    }

    private static final Map<String, Command> COMMANDS =
            Map.ofEntries(
                    Map.entry("judge", Judge::run),
                    Map.entry("write", Writer::write),
                    Map.entry("write-forever", Writer::writeForever),
                    Map.entry("write-paced", PacedWriter::run),
                    Map.entry("change", Changer::run),
                    Map.entry("delete", Writer::delete),
                    Map.entry("read", Reader::run),
                    Map.entry("follow", Reader::follow),
                    Map.entry("list", Inspection::list),
                    Map.entry("metadata", Inspection::metadata),
                    Map.entry("under-replicated", Inspection::underReplicated),
                    Map.entry("auditor", Inspection::auditor));

    private static final ObjectMapper JSON = new ObjectMapper();

    private Main() {}

    public static void main(String[] arguments) throws Exception {
        Output output = new Output(System.out);
        System.setOut(System.err); // what libraries print must not come between our lines
        var stdin = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = stdin.readLine(); line != null; line = stdin.readLine()) {
            output.line("kind", "end", "exit", run(line, output));
        }
        System.exit(WELL);
    }

    private static int run(String line, Output output) {
        try {
            List<?> words = JSON.readValue(line, List.class);
            Command command = COMMANDS.get(words.get(0));
            if (command == null) {
                throw new IllegalArgumentException("no command " + words.get(0));
            }
            Options options = new Options(words.size() > 2 ? (Map<?, ?>) words.get(2) : Map.of());
            return run(command, (String) words.get(1), options, output);
        } catch (IllegalArgumentException
                | IndexOutOfBoundsException
                | ClassCastException
                | JsonProcessingException error) {
            output.line("kind", "error", "error", error.toString());
            return CALLED_WRONGLY;
        } catch (Exception error) {
            output.line("kind", "error", "error", Errors.name(error));
            return COULD_NOT_TELL;
        }
    }

    private static int run(Command command, String metadataServiceUri, Options options, Output output)
            throws Exception {
        Cluster cluster = Cluster.open(metadataServiceUri, options);
        try {
            return command.run(cluster, options, output);
        } finally {
            // Takes the Java client up to 2 s; the end of the process, which may come first, does no harm.
            new Thread(cluster::close).start();
        }
    }
}
