package bookmender;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.PrintStream;
import java.util.LinkedHashMap;
import java.util.Map;

/** JSON lines on stdout, flushed one by one: whoever kills us has read all that was said. */
final class Output {
    private static final ObjectMapper JSON = new ObjectMapper();

    private final PrintStream stream;

    Output(PrintStream stream) {
        this.stream = stream;
    }

    /** Names and values in turn. A line without a value for a name leaves it out. */
    void line(Object... namesAndValues) {
        Map<String, Object> fields = new LinkedHashMap<>();
        for (int at = 0; at < namesAndValues.length; at += 2) {
            if (namesAndValues[at + 1] != null) {
                fields.put((String) namesAndValues[at], namesAndValues[at + 1]);
            }
        }
        line(fields);
    }

    synchronized void line(Map<String, Object> fields) {
        try {
            stream.println(JSON.writeValueAsString(fields));
            stream.flush();
        } catch (JsonProcessingException error) {
            throw new IllegalStateException(error);
        }
    }
}
